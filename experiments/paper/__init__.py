"""What is measured of the networks of Dong, Cordonnier and Loukas (2021)."""
