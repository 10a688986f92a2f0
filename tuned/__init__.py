"""Performance tables, one JSON file per (operation, GPU); `moonpoly_ort.tables` reads them."""
