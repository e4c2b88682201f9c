"""The heat map, of what several features find; other pictures lie with what they show.

Rectangles, lines and text need no library: a plotting one would be imported for hundreds of times the cost, and write
ten times the bytes. Each picture is made in two steps, records to cells and cells to SVG, and both are pure: no file is
read here.
"""
