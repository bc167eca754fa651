"""What is shown: pages, charts, the terminal, and files that are written."""
