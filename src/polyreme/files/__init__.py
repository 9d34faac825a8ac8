"""Files and folders of this machine: direct I/O, and locks on folders."""
