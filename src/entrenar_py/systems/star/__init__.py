"""Trainers over our own protocol, on TCP or simulated: parameter server, mesh and ring."""
