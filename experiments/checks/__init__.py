"""What the checks compare: draws of networks, and proofs beside them."""
