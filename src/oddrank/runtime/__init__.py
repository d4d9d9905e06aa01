"""Our own engine. Importing this package imports no torch; its modules do."""
