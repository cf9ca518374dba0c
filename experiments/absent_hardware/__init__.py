"""What plans say of hardware that is not here, beside what its compiler says."""
