"""Memory, time and cost of a recipe on each machine by formula, before anything is rented. No ML library is used."""
