// Two processes count the words of a text in partitions, and balance the work between them.
//
// Usage: word_counts NAME PEER FILE [PARTITIONS], once for each of two names, on one host or on
// two. A cluster must run (aquifer up). The process whose name comes first creates the partitions,
// and prints the result at the end.
//
// A partition is a segment: the number of counted lines, and a map of the words that belong to the
// partition. An idle process hands a finished partition over to the other one. The other process
// replies with an unfinished partition, with all its counts.
#include <aquifer_containers.hpp>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <fstream>
#include <iostream>
#include <sstream>
#include <thread>

using namespace std::chrono_literals;

// The number of the first partition's segment.
constexpr std::uint64_t first_segment = 100;
constexpr std::uint64_t segment_bytes = 16 << 20;
// Number of lines that a process counts in one step of a partition.
constexpr std::size_t lines_per_step = 200;
// Time for which a process waits for the other one.
constexpr auto peer_timeout = 30s;

// The words of one partition.
struct partition {
    explicit partition(aquifer::allocator<char> memory) : counts(memory) {}

    std::uint64_t number = 0;
    std::size_t lines = 0;
    bool is_over = false;
    std::uint64_t moves = 0;
    aquifer::unordered_map<aquifer::string, long> counts;
};

using owned_partition = aquifer::owned<partition>;
using lines_of_text = std::vector<std::string>;

static std::uint64_t partition_of(std::string_view word, std::uint64_t partitions) {
    std::uint64_t hash = 0xcbf29ce484222325; // FNV-1a
    for (unsigned char byte : word)
        hash = (hash ^ byte) * 0x100000001b3;
    return hash % partitions;
}

// Counts the words of some lines that belong to a partition.
static void count(owned_partition &of, const lines_of_text &lines, std::uint64_t partitions) {
    std::size_t end = std::min(lines.size(), of->lines + lines_per_step);
    for (; of->lines < end; of->lines++) {
        std::istringstream words(lines[of->lines]);
        for (std::string word; words >> word;) {
            if (partition_of(word, partitions) != of->number)
                continue;
            auto found = of->counts.find(std::string_view(word));
            if (found == of->counts.end())
                of->counts.emplace(word.c_str(), 1);
            else
                found->second++;
        }
    }
}

// Waits until the other process is open, and hands a partition over.
static void hand_over(owned_partition given, const std::string &peer) {
    given->moves++;
    for (auto end = std::chrono::steady_clock::now() + peer_timeout;; std::this_thread::sleep_for(20ms)) {
        try {
            given.connect(peer.c_str());
            break;
        } catch (const aquifer::error &) {
            if (std::chrono::steady_clock::now() > end)
                throw;
        }
    }
    std::move(given).transfer();
}

// Compares the counts with those of the whole text, prints the result, and ends the other process.
static void report(std::vector<owned_partition> all, const lines_of_text &lines, const std::string &peer) {
    std::unordered_map<std::string, long> expected;
    for (const std::string &line : lines) {
        std::istringstream words(line);
        for (std::string word; words >> word;)
            expected[word]++;
    }
    std::size_t words = 0;
    std::uint64_t moves = 0;
    for (owned_partition &one : all) {
        moves += one->moves;
        words += one->counts.size();
        for (const auto &[word, times] : one->counts)
            if (expected[std::string(std::string_view(word))] != times)
                throw std::runtime_error("the count of a word is wrong");
    }
    if (words != expected.size())
        throw std::runtime_error("a word was not counted");
    std::cout << words << " different words in " << all.size() << " partitions, " << moves << " hand-overs\n";
    owned_partition last = std::move(all.back());
    all.pop_back();
    last->is_over = true;
    hand_over(std::move(last), peer);
    for (owned_partition &one : all)
        std::move(one).deallocate();
}

static void run(const std::string &name, const std::string &peer, const lines_of_text &lines,
                std::uint64_t partitions) {
    aquifer::process process(name.c_str());
    bool is_first = name < peer, has_asked = false;
    std::vector<owned_partition> work, finished;
    if (is_first)
        for (std::uint64_t number = 0; number < partitions; number++) {
            work.push_back(owned_partition::create(process, first_segment + number, segment_bytes));
            work.back()->number = number;
        }
    for (;;) {
        // A process without work waits for a partition.
        auto received = owned_partition::receive(process, work.empty() ? peer_timeout : 0ms);
        if (received && (*received)->is_over)
            return std::move(*received).deallocate();
        if (received && (*received)->lines < lines.size()) {
            has_asked = false;
            work.push_back(std::move(*received));
        } else if (received) {
            finished.push_back(std::move(*received));
            // A finished partition means that the other process is idle.
            if (work.size() > 1) {
                hand_over(std::move(work.back()), peer);
                work.pop_back();
            }
        } else if (work.empty()) {
            throw std::runtime_error("the other process has handed no partition over");
        }
        for (owned_partition &one : work)
            count(one, lines, partitions);
        auto done = std::partition(work.begin(), work.end(),
                                   [&](const owned_partition &one) { return one->lines < lines.size(); });
        std::move(done, work.end(), std::back_inserter(finished));
        work.erase(done, work.end());
        if (is_first && finished.size() == partitions)
            return report(std::move(finished), lines, peer);
        if (!is_first && work.empty()) {
            // The finished partitions show the other process that this one is idle.
            for (owned_partition &one : finished)
                hand_over(std::move(one), peer);
            finished.clear();
        } else if (work.size() == partitions) {
            // At the start, half of the partitions are for the other process.
            for (std::uint64_t given = 0; given < partitions / 2; given++) {
                hand_over(std::move(work.back()), peer);
                work.pop_back();
            }
        } else if (is_first && work.empty() && !has_asked && !finished.empty()) {
            has_asked = true;
            hand_over(std::move(finished.back()), peer);
            finished.pop_back();
        }
    }
}

int main(int argc, char **argv) {
    if (argc < 4) {
        std::fprintf(stderr, "usage: word_counts NAME PEER FILE [PARTITIONS]\n");
        return 2;
    }
    try {
        std::ifstream file(argv[3]);
        if (!file)
            throw std::runtime_error(std::string("cannot read ") + argv[3]);
        lines_of_text lines;
        for (std::string line; std::getline(file, line);)
            lines.push_back(line);
        run(argv[1], argv[2], lines, argc > 4 ? std::stoull(argv[4]) : 8);
    } catch (const std::exception &failure) {
        std::fprintf(stderr, "word_counts: %s\n", failure.what());
        return 1;
    }
    return 0;
}
