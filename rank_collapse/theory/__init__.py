"""What theory says of a network: residuals in logarithms, bounds, and the rates of collapse."""
