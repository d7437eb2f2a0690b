"""The tree studio: a local web page that shows the trees of a run while it trains (``turntree view RUN``)."""
