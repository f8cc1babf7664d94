"""Full parameters, gradients and optimizer states in hooks of users, on every rank."""
