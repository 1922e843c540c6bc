"""What the program asks of the operating system: files, locks, console, processes, sandbox, storage."""
