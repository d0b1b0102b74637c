"""Components of the HTML reports of jaxtrain.plan, jaxtrain.profile and jaxtrain.report."""
