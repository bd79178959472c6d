"""Files and folders: how they are read, written whole, locked and compared."""
