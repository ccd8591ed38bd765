# Makes bench/alloc/sample.trace: awk -f bench/alloc/sample.awk > bench/alloc/sample.trace
# 4000 allocations: bursts of 1 to 16 at a moment, 4 ms apart on the average (exponential); class k twice as often as class k + 1.
# A generator of its own, in whole numbers, so that every awk makes the same.
function draw(below) {
    seed = (seed * 16807) % 2147483647
    return seed % below
}
BEGIN {
    seed = 20240711
    print "# MICROSECONDS SIZE_CLASS, made by sample.awk"
    while (made < 4000) {
        at += int(-4000 * log((draw(1000000) + 1) / 1000001))
        for (left = 1 + draw(16); left > 0 && made < 4000; left--) {
            k = 0
            while (k < 9 && draw(2) == 1) k++
            print at, k
            made++
        }
    }
}
