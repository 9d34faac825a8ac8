"""Files and folders of this machine: direct I/O, and whose a folder is."""
