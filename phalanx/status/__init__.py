"""What every rank is doing: asked over sockets, told as a report. Knows neither torch nor a running world."""
