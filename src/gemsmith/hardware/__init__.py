"""Facts about chips, machines and prices, each with its source and date."""
