//! Linux' disks whose BARs exchange their addresses, while another disk works.

use anyhow::ensure;
use transom_tests::guest::Guest;
use transom_tests::say;

use crate::{BOOT, SOON, WORK, disks, find, with_tools};

/// Takes two disks with the offsets of their BARs in dwords, and a third disk. Writes data to the
/// two. Then their BARs exchange addresses in halves, one over the other, while they decode. Linux
/// finds the disks again, gives them addresses, and reads the data. Meanwhile, the third one works.
const EXCHANGE: &str = r#"
set -e
pci() { realpath /sys/block/$1/device | grep -o '0000:00:[0-9a-f.]*' | head -n 1; }
head -c 8388608 /dev/urandom > /data
for disk in $1 $3; do dd if=/data of=/dev/$disk bs=1M conv=fsync 2> /dev/null; done
one=$(pci $1) two=$(pci $3)
(
  chroot /tools fio --name=busy --filename=/dev/$5 --rw=randwrite --bs=4k --iodepth=16 \
    --ioengine=libaio --direct=1 --size=32M --time_based --runtime=8 --verify=crc32c \
    --verify_fatal=1 --verify_backlog=64 --eta=never --output=/dev/null && touch /busy
) &
cd /sys/bus/pci/devices
for at in $one $two; do sed -n '1p;5p' $at/resource; done
for it in $one $two; do echo $it > $it/driver/unbind; done
dd if=$one/config of=/one bs=4 skip=$2 count=2 2> /dev/null
dd if=$two/config of=/two bs=4 skip=$4 count=2 2> /dev/null
dd if=/two of=$one/config bs=4 seek=$2 conv=notrunc 2> /dev/null
dd if=/one of=$two/config bs=4 seek=$4 conv=notrunc 2> /dev/null
dd if=$one/config of=/new bs=4 skip=$2 count=2 2> /dev/null
cmp /new /two && ! cmp -s /one /two
for it in $one $two; do echo 1 > $it/remove; done
echo 1 > /sys/bus/pci/rescan
sleep 2
for at in $one $two; do sed -n '1p;5p' $at/resource; done
for at in $one $two; do
  disk=$(ls $at/virtio*/block $at/nvme/nvme*/ 2> /dev/null | grep -E '^(vd.|nvme.*n1)$')
  echo 3 > /proc/sys/vm/drop_caches
  dd if=/dev/$disk bs=1M count=8 2> /dev/null | cmp - /data
  echo "$at $disk kept"
done
wait
[ -e /busy ] && echo busy
"#;

pub(crate) fn exchanges_addresses(release: &str) -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let setups = [("virtio-blk", "raw", 1), ("nvme", "raw", 1), ("virtio-blk", "qcow2", 1)];
    let disks = disks(folder.path(), &setups, &mut Vec::new())?;
    let mut guest = Guest::transom().cpus("2").memory("1G").word("--jail").word("on");
    for disk in &disks {
        guest = guest.word("--device").word(&disk.words);
    }
    let linux = with_tools(guest, release)?.file("exchange.sh", EXCHANGE);
    let mut booted = linux.boot(BOOT)?;
    booted.run("sh /tools.sh", SOON)?;
    let names: Vec<_> = disks.iter().map(|it| find(&mut booted, &it.serial)).collect();
    let names = names.into_iter().collect::<anyhow::Result<Vec<_>>>()?;
    let [one, two, busy] = &names[..] else { anyhow::bail!("{names:?}") };
    // BAR 4 of virtio, BAR 0 of NVMe.
    let said = booted.run(&format!("sh /exchange.sh {one} 8 {two} 4 {busy}"), WORK)?;
    say!("{said}");
    ensure!(said.matches(" kept").count() == 2 && said.contains("busy"), "{said}");
    booted.running.send("poweroff -f")?;
    booted.running.ends_with(0, SOON)
}
