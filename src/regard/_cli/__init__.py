"""What the commands do, apart from the parsing of their options."""
