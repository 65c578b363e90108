"""How ``regard.watch`` sees: where calls are met (``_meet``), what they say (``_seen``), which module makes them."""
