// Maps, slices, goroutines and garbage, checked word by word. Built alone it is static, with check_cgo.go linked with libc.
// check [MEBIBYTES] prints the same line on every run.
package main

import (
	"fmt"
	"os"
	"strconv"
	"sync"
)

const pieceWords = 2048

func mix(x uint64) uint64 {
	x += 0x9E3779B97F4A7C15
	x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
	x = (x ^ (x >> 27)) * 0x94D049BB133111EB
	return x ^ (x >> 31)
}

func word(number, version, at int) uint64 {
	return mix(uint64(number)<<32 + uint64(version)<<16 + uint64(at))
}

func piece(number, version int) []uint64 {
	words := make([]uint64, pieceWords)
	for at := range words {
		words[at] = word(number, version, at)
	}
	return words
}

func verify(words []uint64, number, version int) {
	for at, found := range words {
		if found != word(number, version, at) {
			fmt.Fprintf(os.Stderr, "check FAILED: piece %d word %d: %x\n", number, at, found)
			os.Exit(1)
		}
	}
}

func main() {
	mebibytes := 128
	if len(os.Args) > 1 {
		mebibytes, _ = strconv.Atoi(os.Args[1])
	}
	pieces := mebibytes << 20 / (pieceWords * 8)
	kept := make([][]uint64, pieces)
	names := map[string]int{}
	for number := range kept {
		kept[number] = piece(number, 0)
		names[fmt.Sprint("piece ", number)] = number
	}
	for version := 1; version <= 2; version++ {
		var all sync.WaitGroup
		for first := 0; first < 4; first++ {
			all.Add(1)
			go func(first, version int) {
				defer all.Done()
				for number := first; number < pieces; number += 4 {
					verify(kept[number], number, version-1)
					kept[number] = piece(number, version)
				}
			}(first, version)
		}
		all.Wait()
	}
	var sum uint64
	for name, number := range names {
		if name != fmt.Sprint("piece ", number) {
			os.Exit(1)
		}
		verify(kept[number], number, 2)
		sum += mix(kept[number][number%pieceWords])
	}
	fmt.Printf("check ok pieces %d digest %x\n", pieces, sum)
}
