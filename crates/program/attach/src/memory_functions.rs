//! The functions of libc that the compiler calls to copy, set and compare memory.
//!
//! A program may have functions of these names, for example if it is built with sanitizers. The
//! worker must not call them, because they may use evicted memory of the program. So this library
//! has its own functions, which the program does not see.

use core::arch::global_asm;

global_asm!(
    ".pushsection .text.aquifer_memory_functions, \"ax\", @progbits",
    ".globl memcpy, memmove, memset, memcmp, bcmp",
    ".hidden memcpy, memmove, memset, memcmp, bcmp",
    ".type memcpy, @function",
    ".type memmove, @function",
    ".type memset, @function",
    ".type memcmp, @function",
    ".type bcmp, @function",
    // memmove(to, from, length): from the end if `to` is inside of what is read.
    "memmove:",
    "mov rax, rdi",
    "sub rax, rsi",
    "cmp rax, rdx",
    "jae memcpy",
    "mov rax, rdi",
    "mov rcx, rdx",
    "lea rdi, [rdi + rcx - 1]",
    "lea rsi, [rsi + rcx - 1]",
    "std",
    "rep movsb",
    "cld",
    "ret",
    // memcpy(to, from, length): some bytes by words, of which the last ones may overlap; many by
    // the processor's own loop, which takes long to begin. All is copied upwards, and the last
    // words are read first, because memmove comes here, too.
    "memcpy:",
    "mov rax, rdi",
    "cmp rdx, 512",
    "ja 4f",
    "cmp rdx, 32",
    "ja 22f",
    "cmp rdx, 16",
    "jae 5f",
    "cmp rdx, 8",
    "jae 6f",
    "4:",
    "mov rcx, rdx",
    "rep movsb",
    "ret",
    "5:",
    "movups xmm0, [rsi]",
    "movups xmm1, [rsi + rdx - 16]",
    "movups [rdi], xmm0",
    "movups [rdi + rdx - 16], xmm1",
    "ret",
    "6:",
    "mov rcx, [rsi]",
    "mov rsi, [rsi + rdx - 8]",
    "mov [rdi], rcx",
    "mov [rdi + rdx - 8], rsi",
    "ret",
    "22:",
    "movups xmm2, [rsi + rdx - 32]",
    "movups xmm3, [rsi + rdx - 16]",
    "lea rcx, [rdi + rdx - 32]",
    "23:",
    "movups xmm0, [rsi]",
    "movups xmm1, [rsi + 16]",
    "add rsi, 32",
    "movups [rdi], xmm0",
    "movups [rdi + 16], xmm1",
    "add rdi, 32",
    "cmp rdi, rcx",
    "jb 23b",
    "movups [rcx], xmm2",
    "movups [rcx + 16], xmm3",
    "ret",
    // memset(to, byte, length), in the same way
    "memset:",
    "mov r8, rdi",
    "movzx eax, sil",
    "cmp rdx, 512",
    "ja 7f",
    "cmp rdx, 8",
    "jae 8f",
    "7:",
    "mov rcx, rdx",
    "rep stosb",
    "mov rax, r8",
    "ret",
    "8:",
    "movabs rcx, 0x0101010101010101",
    "imul rcx, rax",
    "mov rax, r8",
    "cmp rdx, 32",
    "ja 24f",
    "mov [rdi], rcx",
    "mov [rdi + rdx - 8], rcx",
    "cmp rdx, 16",
    "jbe 9f",
    "mov [rdi + 8], rcx",
    "mov [rdi + rdx - 16], rcx",
    "9:",
    "ret",
    "24:",
    "movq xmm0, rcx",
    "punpcklqdq xmm0, xmm0",
    "lea rcx, [rdi + rdx - 32]",
    "25:",
    "movups [rdi], xmm0",
    "movups [rdi + 16], xmm0",
    "add rdi, 32",
    "cmp rdi, rcx",
    "jb 25b",
    "movups [rcx], xmm0",
    "movups [rcx + 16], xmm0",
    "ret",
    // memcmp(one, other, length), bcmp(one, other, length)
    "memcmp:",
    "bcmp:",
    "xor eax, eax",
    "2:",
    "sub rdx, 1",
    "jb 3f",
    "movzx eax, byte ptr [rdi]",
    "movzx ecx, byte ptr [rsi]",
    "inc rdi",
    "inc rsi",
    "sub eax, ecx",
    "je 2b",
    "3:",
    "ret",
    ".popsection",
);

#[cfg(test)]
mod tests {
    // The functions under test must not compute the expected bytes.
    use std::hint::black_box;

    unsafe extern "C" {
        fn memcpy(to: *mut u8, from: *const u8, length: usize) -> *mut u8;
        fn memmove(to: *mut u8, from: *const u8, length: usize) -> *mut u8;
        fn memset(to: *mut u8, byte: i32, length: usize) -> *mut u8;
        fn memcmp(one: *const u8, other: *const u8, length: usize) -> i32;
        fn bcmp(one: *const u8, other: *const u8, length: usize) -> i32;
    }

    /// Bytes of the tested memory, more than all lengths with a separate case.
    const BYTES: usize = 1100;

    fn numbers() -> Vec<u8> {
        (0..BYTES).map(|number| (number % 251) as u8).collect()
    }

    #[test]
    fn memory_is_copied_also_onto_itself() {
        for distance in (-70_i64..=70).chain([-550, 550]) {
            let (from, to) = ((-distance).max(0) as usize, distance.max(0) as usize);
            for length in (0..=100).chain([500, 511, 512, 513, BYTES]) {
                let length = length.min(BYTES - from.max(to));
                let (mut moved, source) = (numbers(), numbers());
                let mut expected = numbers();
                (0..length).for_each(|at| expected[black_box(to + at)] = source[from + at]);
                let start = moved.as_mut_ptr();
                // SAFETY: both ranges are within the bytes.
                unsafe {
                    assert_eq!(memmove(start.add(to), start.add(from), length), start.add(to));
                }
                assert_eq!(moved, expected, "{length} bytes from {from} to {to}");
            }
        }
        for length in 0..=BYTES {
            let (source, mut copy) = (numbers(), vec![0; BYTES]);
            // SAFETY: two vectors with as many bytes.
            unsafe { assert_eq!(memcpy(copy.as_mut_ptr(), source.as_ptr(), length), copy.as_mut_ptr()) };
            assert_eq!(copy[..length], source[..length]);
            assert!(copy[length..].iter().all(|byte| *byte == 0));
        }
    }

    #[test]
    fn memory_is_set() {
        for length in 0..=BYTES - 3 {
            let (mut set, mut expected) = (numbers(), numbers());
            (0..length).for_each(|at| expected[black_box(3 + at)] = 0x91);
            // SAFETY: the range is within the bytes.
            unsafe {
                let start = set.as_mut_ptr().add(3);
                assert_eq!(memset(start, 0x791, length), start);
            }
            assert_eq!(set, expected);
        }
    }

    #[test]
    fn memory_is_compared_as_unsigned_bytes() {
        // SAFETY: all have as many bytes as are compared.
        let compared = |one: &[u8], other: &[u8]| unsafe {
            let length = one.len();
            let result = memcmp(one.as_ptr(), other.as_ptr(), length).signum();
            assert_eq!(bcmp(one.as_ptr(), other.as_ptr(), length) != 0, result != 0);
            result
        };
        assert_eq!(compared(b"", b""), 0);
        assert_eq!(compared(b"abc", b"abc"), 0);
        assert_eq!(compared(b"ab\x80", b"ab\x7f"), 1);
        assert_eq!(compared(b"a\x01z", b"a\xffa"), -1);
    }
}
