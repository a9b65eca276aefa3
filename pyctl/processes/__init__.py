"""Child processes of pyctl: commands, environments, ends; and the memory of this process."""
