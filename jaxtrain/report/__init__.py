"""What people look at: HTML pages, and tables on a terminal."""
