"""Which context parallel rank is assigned which tokens."""
