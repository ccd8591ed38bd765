// A map in a segment that is synced. Prints "done".
//
// synced NAME
#include <aquifer_containers.hpp>

#include <cstdio>

using words = aquifer::map<aquifer::string, int>;

static void run(const char *name) {
    aquifer::process self(name);
    auto owned = aquifer::owned<words>::create(self, 3, 1 << 20);
    owned->emplace(owned.text("water"), 1);
    owned.sync(2);
    owned->emplace(owned.text("stone"), 2);
    owned.sync(1);
    if (aquifer::owned<words>::restore(self, 3, std::chrono::milliseconds(0)))
        throw std::runtime_error("it was not lost");
    if (owned->size() != 2)
        throw std::runtime_error("a word is missing");
    std::move(owned).deallocate();
}

int main(int, char **argv) {
    try {
        run(argv[1]);
        std::puts("done");
    } catch (const std::exception &failure) {
        std::fprintf(stderr, "synced: %s\n", failure.what());
        return 1;
    }
    return 0;
}
