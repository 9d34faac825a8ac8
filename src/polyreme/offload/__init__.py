"""Numbers off the device: in host memory or in files, read ahead of their use and written behind it."""
