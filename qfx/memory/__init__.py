"""Where the values of tensors lie: pages given back, files in the place of memory, what changed."""
