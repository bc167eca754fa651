"""Output for people: HTML pages, charts, the terminal, and the writing of files."""
