"""Reading of configuration files, with the line of each value and a message for each wrong one."""
