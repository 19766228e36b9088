"""Adapters to other libraries; each is imported only when it is asked for."""
