"""The machine that a command runs on: its cores, devices, memory and installed versions."""
