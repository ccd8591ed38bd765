// libaquifer: containers of the standard library in segments, for C++17 and later.
//
//     using words = aquifer::unordered_map<aquifer::string, long>;
//     aquifer::process self("first");
//     auto owned = aquifer::owned<words>::create(self, 7, 64 << 20);
//     owned->emplace("water", 1);
//     owned.connect("second");
//     std::move(owned).transfer();
//
// and in the other process:
//
//     aquifer::process self("second");
//     if (auto owned = aquifer::owned<words>::receive(self))
//         std::cout << (*owned)->at(owned->text("water"));
//
// A type may be in a segment if it has no pointer to memory outside of the segment: containers of
// this header, numbers, and structs of them, but no virtual function, and no memory of the global
// allocator. Such a struct has a constructor from aquifer::allocator<char>, which it passes on to
// its containers. Both programs must be built by the same compiler with the same standard library;
// opening a value of a type with another name fails. The fields of a struct are not compared:
// change its version when they change.
//
// If the segment is full, calls throw std::bad_alloc. For other errors they throw aquifer::error.
#ifndef AQUIFER_CONTAINERS_HPP
#define AQUIFER_CONTAINERS_HPP

#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <new>
#include <optional>
#include <scoped_allocator>
#include <stdexcept>
#include <string>
#include <string_view>
#include <typeinfo>
#include <unordered_map>
#include <utility>
#include <vector>

#include "aquifer.h"
#include "aquifer_containers.h"

namespace aquifer {

// A call that failed. `code` is an errno.
class error : public std::runtime_error {
public:
    explicit error(int code) : std::runtime_error(aquifer_error()), code(code) {}
    int code;
};

namespace detail {
inline int check(int value) {
    if (value < 0)
        throw error(-value);
    return value;
}
} // namespace detail

// The allocator of a segment. Each container has a copy, which get_allocator() returns.
template <class T>
class allocator {
public:
    using value_type = T;
    // A container keeps its own segment when it is assigned or swapped.
    using propagate_on_container_copy_assignment = std::false_type;
    using propagate_on_container_move_assignment = std::false_type;
    using propagate_on_container_swap = std::false_type;
    using is_always_equal = std::false_type;

    explicit allocator(aquifer_segment_heap *heap) noexcept : heap(heap) {}
    template <class U>
    allocator(const allocator<U> &other) noexcept : heap(other.heap) {}

    T *allocate(std::size_t count) {
        if (count > static_cast<std::size_t>(-1) / sizeof(T))
            throw std::bad_alloc();
        void *memory = aquifer_segment_heap_allocate(heap, count * sizeof(T), alignof(T));
        if (!memory)
            throw std::bad_alloc();
        return static_cast<T *>(memory);
    }

    void deallocate(T *memory, std::size_t) noexcept {
        aquifer_segment_heap_free(heap, memory, alignof(T));
    }

    template <class U>
    bool operator==(const allocator<U> &other) const noexcept {
        return heap == other.heap;
    }
    template <class U>
    bool operator!=(const allocator<U> &other) const noexcept {
        return heap != other.heap;
    }

    aquifer_segment_heap *heap;
};

// Passes the segment's allocator on to the values of a container.
template <class T>
using scoped = std::scoped_allocator_adaptor<allocator<T>>;

using string = std::basic_string<char, std::char_traits<char>, allocator<char>>;

template <class T>
using vector = std::vector<T, scoped<T>>;

// A map that can also be searched by std::string_view.
template <class K, class V, class Less = std::less<>>
using map = std::map<K, V, Less, scoped<std::pair<const K, V>>>;

template <class K>
struct hash : std::hash<K> {};
template <>
struct hash<string> {
    using is_transparent = void;
    std::size_t operator()(std::string_view text) const noexcept { return std::hash<std::string_view>()(text); }
};

// A hash map. From C++20 on, keys can also be searched by std::string_view.
template <class K, class V, class Hash = hash<K>, class Equal = std::equal_to<>>
using unordered_map = std::unordered_map<K, V, Hash, Equal, scoped<std::pair<const K, V>>>;

// Selects when missing pages are pulled: see aquifer_segments.h.
enum class pulling { ahead = AQUIFER_PULL_AHEAD, explicitly = AQUIFER_PULL_EXPLICIT, on_touch = AQUIFER_PULL_ON_TOUCH };

// The registration of this process under a name. It must outlive the values that the process owns.
class process {
public:
    explicit process(const char *name, const char *socket = nullptr)
        : handle(aquifer_process_open(socket, name)) {
        if (!handle)
            throw std::runtime_error(aquifer_error());
    }
    ~process() { aquifer_process_close(handle); }
    process(const process &) = delete;
    process &operator=(const process &) = delete;

    aquifer_process *handle;
};

// A value in a segment that this process owns, at the same address in each process.
//
// The value must be handed over, freed, or kept until the process ends. In the last case, the next
// process of the name receives it.
template <class T>
class owned {
public:
    // Allocates a segment of `bytes` bytes with the number `id`, and constructs the value in it.
    static owned create(process &of, std::uint64_t id, std::uint64_t bytes, int version = 1) {
        aquifer_segment *segment;
        detail::check(aquifer_segment_allocate(of.handle, id, bytes, &segment));
        aquifer_segment_heap *heap;
        int made = aquifer_segment_heap_create(segment, type(version).c_str(), &heap);
        if (made < 0) {
            error failure(-made);
            aquifer_segment_deallocate(segment);
            throw failure;
        }
        try {
            allocator<T> memory(heap);
            T *root = memory.allocate(1);
            new (root) T(allocator<char>(heap));
            aquifer_segment_heap_set_root(heap, root);
        } catch (...) {
            aquifer_segment_deallocate(segment);
            throw;
        }
        return owned(segment, heap);
    }

    // Waits for a value that is handed over to this process, or that an earlier process of its name
    // has left. Returns nullopt after the timeout.
    static std::optional<owned> receive(process &at, std::chrono::milliseconds timeout = std::chrono::seconds(10),
                                        pulling how = pulling::ahead, int version = 1) {
        aquifer_segment *segment;
        auto wait = static_cast<std::uint64_t>(timeout.count());
        if (!detail::check(aquifer_segment_receive(at.handle, static_cast<int>(how), wait, &segment)))
            return std::nullopt;
        aquifer_segment_heap *heap;
        detail::check(aquifer_segment_heap_open(segment, type(version).c_str(), &heap));
        return owned(segment, heap);
    }

    // Restores a value from the copies of the last sync of its segment. Returns nullopt if a host
    // still has the segment after the timeout. Throws ENODATA if the segment was never synced.
    static std::optional<owned> restore(process &at, std::uint64_t id, std::chrono::milliseconds timeout,
                                        int version = 1) {
        aquifer_segment *segment;
        auto wait = static_cast<std::uint64_t>(timeout.count());
        if (!detail::check(aquifer_segment_restore(at.handle, id, wait, &segment)))
            return std::nullopt;
        aquifer_segment_heap *heap;
        detail::check(aquifer_segment_heap_open(segment, type(version).c_str(), &heap));
        return owned(segment, heap);
    }

    owned(owned &&other) noexcept
        : segment(std::exchange(other.segment, nullptr)), heap(std::exchange(other.heap, nullptr)) {}
    owned &operator=(owned &&other) noexcept {
        std::swap(segment, other.segment);
        std::swap(heap, other.heap);
        return *this;
    }

    T &operator*() const { return *static_cast<T *>(aquifer_segment_heap_root(heap)); }
    T *operator->() const { return &**this; }

    // The allocator of the segment, for new values in it.
    allocator<char> get_allocator() const { return allocator<char>(heap); }

    // Copies a text to the segment, for example for a new key.
    string text(std::string_view words) const { return string(words, get_allocator()); }

    // Prepares a hand-over to another process of the user, so that transfer is fast.
    void connect(const char *name) { detail::check(aquifer_segment_connect(segment, name)); }

    // Hands the value over. Nothing of the segment may be used afterwards. If the call throws
    // EAGAIN, the process still owns the value.
    void transfer() && {
        int outcome = aquifer_segment_transfer(segment);
        if (outcome != -EAGAIN)
            segment = nullptr;
        detail::check(outcome);
    }

    // Prepares a hand-over, and hands the value over.
    void migrate(const char *name) && {
        connect(name);
        std::move(*this).transfer();
    }

    // Writes the changed bytes to `copies` memory nodes. No other thread may change the value
    // during the call.
    void sync(unsigned copies) { detail::check(aquifer_segment_sync(segment, copies)); }

    // Pulls all missing pages, and waits for them.
    void close() { detail::check(aquifer_segment_close(segment)); }

    // Frees the segment. Destructors of values do not run.
    void deallocate() && { detail::check(aquifer_segment_deallocate(std::exchange(segment, nullptr))); }

    aquifer_segment *segment;

private:
    owned(aquifer_segment *segment, aquifer_segment_heap *heap) : segment(segment), heap(heap) {}

    static std::string type(int version) {
        return std::string("C++ ") + typeid(T).name() + " " + std::to_string(version) + ":" +
               std::to_string(sizeof(T)) + "/" + std::to_string(alignof(T)) +
#ifdef _GLIBCXX_RELEASE
               " libstdc++ " + std::to_string(_GLIBCXX_RELEASE) + "." + std::to_string(_GLIBCXX_USE_CXX11_ABI) +
#endif
#ifdef _LIBCPP_VERSION
               " libc++ " + std::to_string(_LIBCPP_VERSION) +
#endif
               " " __VERSION__;
    }

    aquifer_segment_heap *heap;
};

} // namespace aquifer

#endif
