//! Golden bytes of `docs/formats/ipc.md`: the keeper's record of a node, and the epochs beside it.
//! A changed golden file needs a changed document. A new field needs a default, because a node of
//! another build reads the record.

use aquifer_fabric::Host;
use aquifer_tests_support::golden;

use super::{HostEpochs, KeptMemoryRecord};

#[test]
fn golden_record_and_epochs_of_a_node() {
    let mut golden = golden!("kept");
    for (name, is_disk) in [("node", false), ("disk node", true)] {
        let record = KeptMemoryRecord { epoch: 1, key: 2, is_disk };
        let text = serde_json::to_string(&record).expect("numbers can be written");
        assert_eq!(serde_json::from_str::<KeptMemoryRecord>(&text).expect("it was just written"), record);
        golden.text(name, &text);
    }
    let epochs = HostEpochs::new().expect("there is memory");
    epochs.record(Host(1), 0x0102_0304_0506_0708);
    epochs.record(Host(4095), 0x1112_1314_1516_1718);
    golden.memfd(epochs.fd());
    let fd = epochs.fd().try_clone_to_owned().expect("there are descriptors");
    let again = HostEpochs::open(fd).expect("it is such memory").all();
    assert_eq!(
        again.into_iter().collect::<Vec<_>>(),
        [(Host(1), 0x0102_0304_0506_0708), (Host(4095), 0x1112_1314_1516_1718)]
    );
    golden.check();
}
