"""The dashboards for Grafana, as code."""
