"""What users do without having read the docs: each is equal to plain torch, or an error that names the thing."""
