"""Requests that outlive their replicas: deadlines, losses and moves."""
