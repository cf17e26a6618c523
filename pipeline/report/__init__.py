"""A verdict for people: a terminal table, plots, and a page that needs nothing but itself."""
