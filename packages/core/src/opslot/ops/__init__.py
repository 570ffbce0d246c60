"""The contracts that opslot itself brings, one file per op."""
