"""Take the same train steps on several layouts, and compare them number by number."""
