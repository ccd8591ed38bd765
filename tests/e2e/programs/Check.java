// Garbage and what is kept, checked word by word, under whatever collector.
// java Check [MEBIBYTES] prints the same lines on every run.
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;

public final class Check {
    private static final int PIECE_WORDS = 2048;

    private static long mix(long x) {
        x += 0x9E3779B97F4A7C15L;
        x = (x ^ (x >>> 30)) * 0xBF58476D1CE4E5B9L;
        x = (x ^ (x >>> 27)) * 0x94D049BB133111EBL;
        return x ^ (x >>> 31);
    }

    private static long[] piece(int number, int version) {
        long[] words = new long[PIECE_WORDS];
        for (int i = 0; i < words.length; i++) words[i] = mix(((long) number << 32) + ((long) version << 16) + i);
        return words;
    }

    private static void verify(long[] words, int number, int version) {
        for (int i = 0; i < words.length; i++) {
            long expected = mix(((long) number << 32) + ((long) version << 16) + i);
            if (words[i] != expected) {
                System.err.println("Check FAILED: piece " + number + " word " + i + ": " + words[i]);
                System.exit(1);
            }
        }
    }

    public static void main(String[] arguments) throws InterruptedException {
        int mebibytes = arguments.length > 0 ? Integer.parseInt(arguments[0]) : 128;
        int pieces = mebibytes * (1 << 20) / (PIECE_WORDS * 8);
        List<long[]> kept = new ArrayList<>();
        Map<String, Integer> names = new HashMap<>();
        for (int number = 0; number < pieces; number++) {
            kept.add(piece(number, 0));
            names.put("piece " + number, number);
        }
        for (int round = 1; round <= 2; round++) {
            int version = round;
            Thread[] threads = new Thread[2];
            for (int t = 0; t < threads.length; t++) {
                int first = t;
                threads[t] = new Thread(() -> {
                    for (int number = first; number < pieces; number += threads.length) {
                        verify(kept.get(number), number, version - 1);
                        kept.set(number, piece(number, version));
                    }
                });
                threads[t].start();
            }
            for (Thread thread : threads) thread.join();
        }
        long sum = 0;
        for (Map.Entry<String, Integer> name : names.entrySet()) {
            int number = name.getValue();
            if (!name.getKey().equals("piece " + number)) System.exit(1);
            verify(kept.get(number), number, 2);
            sum += mix(kept.get(number)[number % PIECE_WORDS]);
        }
        System.out.println("Check ok pieces " + pieces + " digest " + Long.toHexString(sum));
    }
}
