"""Files and text: what every other room stands on."""
