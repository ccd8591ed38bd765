//! Golden names of `docs/formats/directory.md`: the keys of a cluster in etcd.
//!
//! A changed golden file needs a changed document, and a way to find the old keys.

use aquifer_tests_support::golden;

use crate::keys::EtcdKeys;

#[test]
fn golden_keys_in_an_etcd() {
    let mut golden = golden!("keys");
    let keys = EtcdKeys::new("default");
    golden.text("key", &keys.outer("nodes/1"));
    golden.text("prefix of all", &keys.outer(""));
    golden.text("epoch", &keys.epoch);
    assert_eq!(keys.inner(keys.outer("nodes/1").as_bytes()), Ok("nodes/1".to_owned()));
    golden.check();
}
