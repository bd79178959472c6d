"""Files and folders: reading, writing as a whole, locking, comparing and mapping to memory."""
