"""Self-contained HTML pages with pictures; needs jinja2 and matplotlib."""
