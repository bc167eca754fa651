"""Output for people: pages, charts, the terminal, and the writing of files."""
