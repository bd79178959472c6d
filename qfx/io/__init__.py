"""Files and folders: how they are read, written whole, locked, compared and mapped to memory."""
