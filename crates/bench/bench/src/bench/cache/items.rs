//! Items: their keys and values, and which values a server may still return.

use aquifer_bench::support::random::Random;

/// Length of each key.
pub const KEY_BYTES: usize = 20;
/// Bytes of a value that name its key and its version.
const HEADER_BYTES: usize = 8;
/// Lengths of mixed values.
const MIXED_BYTES: std::ops::RangeInclusive<usize> = 50..=4000;
/// Random bytes, of which each value has a part.
const PATTERN_BYTES: usize = 8192;
/// The parts begin below this.
const PATTERN_STARTS: usize = PATTERN_BYTES - *MIXED_BYTES.end();
/// Time for which a server may return an expired item: its clock has steps of 1 s, which come late
/// if its processor is busy.
const EXPIRY_SLACK_MS: u32 = 5000;

/// Lengths of values.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Lengths {
    /// All values have this many bytes, 8 to 4000.
    Fixed(usize),
    /// Each key has its own length, uniformly distributed over 50 to 4000 bytes.
    Mixed,
}

/// The time from a set to the expiry of the item.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Lifetime {
    /// Items do not expire.
    Unlimited,
    /// Each key has its own time, uniformly distributed over this range.
    Seconds { min: u32, max: u32 },
}

/// State of one key.
#[derive(Clone, Copy, Debug)]
struct KeyState {
    /// The newest version that was sent; 0 if none was.
    newest: u32,
    /// The oldest version that may be returned: older ones were replaced before the last set began.
    oldest: u32,
    /// The first version of the sets that overlap with those that are in flight.
    first_in_flight: u32,
    in_flight: u32,
    /// Time by which the newest version has expired, in ms of the load's clock.
    expired_ms: u32,
}

const UNSET: KeyState =
    KeyState { newest: 0, oldest: 0, first_in_flight: 0, in_flight: 0, expired_ms: u32::MAX };

/// The items of one server.
#[derive(Debug)]
pub struct Items {
    lengths: Lengths,
    lifetime: Lifetime,
    pattern: Vec<u8>,
    states: Vec<KeyState>,
}

impl Items {
    /// Items of this many keys, none of which was set.
    pub fn new(keys: u32, lengths: Lengths, lifetime: Lifetime) -> Self {
        let mut random = Random(11);
        let words = std::iter::repeat_with(|| random.word()).take(PATTERN_BYTES / 8);
        let pattern = words.flat_map(u64::to_le_bytes).collect();
        Self { lengths, lifetime, pattern, states: vec![UNSET; keys as usize] }
    }

    /// The number of keys.
    pub fn keys(&self) -> u32 {
        u32::try_from(self.states.len()).expect("made from a u32")
    }

    /// Appends a set of the key's next version to `request`, and returns the version.
    pub fn push_set(&mut self, key: u32, request: &mut Vec<u8>) -> u32 {
        let state = &mut self.states[key as usize];
        state.newest += 1;
        if state.in_flight == 0 {
            state.first_in_flight = state.newest;
        }
        state.in_flight += 1;
        state.expired_ms = u32::MAX;
        let version = state.newest;
        let length = self.value_bytes(key);
        request.extend_from_slice(b"set ");
        request.extend_from_slice(&key_text(key));
        request.extend_from_slice(b" 0 ");
        push_number(self.lifetime_s(key), request);
        request.push(b' ');
        push_number(u32::try_from(length).expect("at most 4000"), request);
        request.extend_from_slice(b"\r\n");
        request.extend_from_slice(&key.to_le_bytes());
        request.extend_from_slice(&version.to_le_bytes());
        request.extend_from_slice(self.filler(key, version, length));
        request.extend_from_slice(b"\r\n");
        version
    }

    /// Records the reply to a set at a time in ms of the load's clock.
    pub fn end_set(&mut self, key: u32, version: u32, now_ms: u32) {
        let lifetime_s = self.lifetime_s(key);
        let state = &mut self.states[key as usize];
        state.in_flight -= 1;
        if state.in_flight == 0 {
            state.oldest = state.first_in_flight;
        }
        if lifetime_s > 0 && version == state.newest {
            state.expired_ms = now_ms + 1000 * lifetime_s + EXPIRY_SLACK_MS;
        }
    }

    /// Appends a get to `request`. Returns the oldest version that its reply may have.
    pub fn push_get(&self, key: u32, request: &mut Vec<u8>) -> u32 {
        request.extend_from_slice(b"get ");
        request.extend_from_slice(&key_text(key));
        request.extend_from_slice(b"\r\n");
        self.states[key as usize].oldest
    }

    /// Checks the reply to a get that was sent when `oldest` was the oldest version.
    ///
    /// # Errors
    /// The difference to the expected reply.
    pub fn check(&self, key: u32, oldest: u32, sent_ms: u32, reply: (&[u8], &[u8])) -> Result<(), String> {
        let (found_key, value) = reply;
        if found_key != key_text(key) {
            return Err(format!("key {key} got the item of {:?}", String::from_utf8_lossy(found_key)));
        }
        let length = self.value_bytes(key);
        if value.len() != length {
            return Err(format!("key {key} has {} bytes, not {length}", value.len()));
        }
        let version_at = HEADER_BYTES / 2;
        if value[..version_at] != key.to_le_bytes() {
            return Err(format!("key {key} has the value of another key"));
        }
        let version = value[version_at..HEADER_BYTES].try_into().map_or(0, u32::from_le_bytes);
        let state = &self.states[key as usize];
        if version < oldest || version > state.newest || version == 0 {
            let newest = state.newest;
            return Err(format!("key {key} has version {version}, not one of {oldest} to {newest}"));
        }
        if value[HEADER_BYTES..] != *self.filler(key, version, length) {
            return Err(format!(
                "the value of key {key}, version {version}, differs from the one that was set"
            ));
        }
        if version == state.newest && sent_ms > state.expired_ms {
            let late_ms = sent_ms - state.expired_ms + EXPIRY_SLACK_MS;
            return Err(format!("key {key} was returned {late_ms} ms after its expiry"));
        }
        Ok(())
    }

    /// Length of the key's values.
    pub fn value_bytes(&self, key: u32) -> usize {
        let (min, max) = (*MIXED_BYTES.start(), *MIXED_BYTES.end());
        match self.lengths {
            Lengths::Fixed(bytes) => bytes,
            Lengths::Mixed => min + Random(u64::from(key) ^ 0x517E).below(max - min + 1),
        }
    }

    /// Time from a set of the key to its expiry; 0 if it does not expire.
    fn lifetime_s(&self, key: u32) -> u32 {
        match self.lifetime {
            Lifetime::Unlimited => 0,
            Lifetime::Seconds { min, max } => {
                let part = Random(u64::from(key) ^ 0x11FE).word() % u64::from(max - min + 1);
                min + u32::try_from(part).expect("below a u32")
            }
        }
    }

    /// The bytes of a value after its header.
    fn filler(&self, key: u32, version: u32, length: usize) -> &[u8] {
        let start = Random((u64::from(key) << 32) | u64::from(version)).below(PATTERN_STARTS);
        &self.pattern[start..start + length - HEADER_BYTES]
    }
}

/// The text of a key: `key:` and 16 hexadecimal digits.
pub fn key_text(key: u32) -> [u8; KEY_BYTES] {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let mut text = *b"key:0000000000000000";
    let number = Random(u64::from(key)).word().to_be_bytes();
    for (digits, byte) in text[KEY_BYTES - 16..].chunks_exact_mut(2).zip(number) {
        digits[0] = DIGITS[usize::from(byte >> 4)];
        digits[1] = DIGITS[usize::from(byte & 15)];
    }
    text
}

fn push_number(number: u32, text: &mut Vec<u8>) {
    let mut digits = [0; 10];
    let mut at = digits.len();
    let mut rest = number;
    loop {
        at -= 1;
        digits[at] = b'0' + u8::try_from(rest % 10).expect("a digit");
        rest /= 10;
        if rest == 0 {
            break;
        }
    }
    text.extend_from_slice(&digits[at..]);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The value in the text of a set.
    fn value_of(request: &[u8]) -> Vec<u8> {
        let line = request.iter().position(|byte| *byte == b'\n').unwrap();
        request[line + 1..request.len() - 2].to_vec()
    }

    fn set(items: &mut Items, key: u32) -> (u32, Vec<u8>) {
        let mut request = Vec::new();
        let version = items.push_set(key, &mut request);
        (version, value_of(&request))
    }

    fn check(items: &Items, key: u32, value: &[u8]) -> Result<(), String> {
        let oldest = items.push_get(key, &mut Vec::new());
        items.check(key, oldest, 0, (&key_text(key), value))
    }

    #[test]
    fn a_set_has_key_lifetime_and_length() {
        let mut items = Items::new(5, Lengths::Fixed(100), Lifetime::Seconds { min: 12, max: 12 });
        let mut request = Vec::new();
        assert_eq!(items.push_set(3, &mut request), 1);
        let line = [b"set ".as_slice(), &key_text(3), b" 0 12 100\r\n"].concat();
        assert!(request.starts_with(&line), "{:?}", String::from_utf8_lossy(&request));
        assert_eq!(request.len(), line.len() + 102);
        assert_eq!((key_text(3).len(), items.keys()), (KEY_BYTES, 5));
    }

    #[test]
    fn only_the_value_of_the_key_is_right() {
        let mut items = Items::new(5, Lengths::Fixed(100), Lifetime::Unlimited);
        let (_, value) = set(&mut items, 3);
        let (_, other) = set(&mut items, 4);
        assert_eq!(check(&items, 3, &value), Ok(()));
        assert!(check(&items, 3, &other).unwrap_err().contains("another key"));
        assert!(check(&items, 3, &value[1..]).unwrap_err().contains("99 bytes"));
        for at in 0..value.len() {
            let mut wrong = value.clone();
            wrong[at] ^= 1;
            assert!(check(&items, 3, &wrong).is_err(), "byte {at}");
        }
        assert!(items.check(3, 0, 0, (&key_text(4), &value)).unwrap_err().contains("the item of"));
    }

    #[test]
    fn a_replaced_version_is_wrong_once_no_set_overlaps() {
        let mut items = Items::new(1, Lengths::Fixed(50), Lifetime::Unlimited);
        let (first, oldest) = set(&mut items, 0);
        items.end_set(0, first, 0);
        let (second, newer) = set(&mut items, 0);
        let (third, newest) = set(&mut items, 0);
        assert!([&oldest, &newer, &newest].iter().all(|value| check(&items, 0, value).is_ok()));
        items.end_set(0, third, 0);
        assert!(check(&items, 0, &oldest).is_ok(), "a set is still in flight");
        items.end_set(0, second, 0);
        assert!(check(&items, 0, &oldest).unwrap_err().contains("version 1, not one of 2 to 3"));
        // The two sets overlapped, so either may be the last.
        assert!(check(&items, 0, &newer).is_ok() && check(&items, 0, &newest).is_ok());
    }

    #[test]
    fn an_expired_item_is_wrong_after_the_slack() {
        let mut items = Items::new(1, Lengths::Mixed, Lifetime::Seconds { min: 1, max: 1 });
        let (version, value) = set(&mut items, 0);
        items.end_set(0, version, 500);
        let at = |sent_ms| items.check(0, version, sent_ms, (&key_text(0), &value));
        assert_eq!(at(1500 + EXPIRY_SLACK_MS), Ok(()));
        assert!(at(1501 + EXPIRY_SLACK_MS).unwrap_err().contains("5001 ms after its expiry"));
    }

    #[test]
    fn mixed_lengths_fill_their_range() {
        let items = Items::new(1, Lengths::Mixed, Lifetime::Unlimited);
        let lengths: Vec<usize> = (0..10_000).map(|key| items.value_bytes(key)).collect();
        let mean = lengths.iter().sum::<usize>() / lengths.len();
        assert!(lengths.iter().all(|length| MIXED_BYTES.contains(length)));
        assert!((1950..2100).contains(&mean), "{mean}");
    }

    #[test]
    fn numbers_are_decimal() {
        for number in [0, 7, 10, 4000, u32::MAX] {
            let mut text = Vec::new();
            push_number(number, &mut text);
            assert_eq!(text, number.to_string().as_bytes());
        }
    }
}
