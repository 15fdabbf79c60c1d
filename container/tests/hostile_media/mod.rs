//! CDs and WIMs with mistakes.

use std::sync::LazyLock;

use container::media::testutil::{self, DESCRIPTORS, Layout, install_cd, seal, windows_11};
use container::media::windows::analyze;
use container::media::{FileSystem, Image as _, el_torito};

const SECTOR: usize = 2048;
const CATALOG: usize = 22;

/// CDs without mistakes.
static CDS: LazyLock<[Vec<u8>; 3]> = LazyLock::new(|| {
    [Layout::Bridge, Layout::Metadata, Layout::Iso].map(|layout| install_cd(layout, &windows_11(9)))
});

/// Changes bytes of descriptors, makes their checksums valid again, and reads the CD. The first
/// byte selects the layout, and each five that follow a change.
pub(crate) fn descriptors(bytes: &[u8]) {
    let Some((layout, changes)) = bytes.split_first() else { return };
    let mut cd = CDS[usize::from(*layout) % CDS.len()].clone();
    for change in changes.chunks_exact(5) {
        // Beyond the known descriptors are directories and further file entries.
        let number = usize::from(change[0]);
        let last = DESCRIPTORS[DESCRIPTORS.len() - 1];
        let sector = DESCRIPTORS.get(number).copied().unwrap_or(last + number % 16);
        let sector = &mut cd[sector * SECTOR..][..SECTOR];
        // Mostly in the first bytes, where the fields are.
        let at = usize::from(u16::from_le_bytes([change[1], change[2]]));
        let at = if change[4] & 2 == 0 { at % 512 } else { at % SECTOR };
        sector[at] = change[3];
        if change[4] & 1 == 0 {
            seal(sector);
        }
    }
    read(&cd);
}

/// A boot catalog with these bytes after its validation entry.
pub(crate) fn catalog(bytes: &[u8]) {
    let mut cd = CDS[0].clone();
    let sector = &mut cd[CATALOG * SECTOR..][..SECTOR];
    let length = bytes.len().min(SECTOR - 32);
    sector[32..32 + length].copy_from_slice(&bytes[..length]);
    let entries = el_torito::entries(&cd[..]).expect("its sectors are there");
    assert!(entries.len() < SECTOR / 32, "{}", entries.len());
    for entry in entries {
        let mut found = [0; 4];
        cd.read(&mut found, entry.sector_at).expect("it is in the catalog");
        assert_eq!(u32::from_le_bytes(found), entry.sector);
    }
    read(&cd);
}

/// A WIM with this text as its XML data.
pub(crate) fn xml(text: &str) {
    let units: Vec<u8> = text.encode_utf16().flat_map(u16::to_le_bytes).collect();
    wim(&units);
}

/// A WIM with these bytes as its XML data.
pub(crate) fn wim(xml: &[u8]) {
    let (mut header, _) = testutil::wim_parts(0, &[]);
    header[44] = xml.first().map_or(0, |it| it % 4);
    let length = (xml.len() as u64).to_le_bytes();
    header[72..79].copy_from_slice(&length[..7]);
    header[80..88].copy_from_slice(&208_u64.to_le_bytes());
    header.extend(xml);
    read(&testutil::cd(Layout::Iso, &[(testutil::WIM, header)]));
}

/// Analyzes a CD. Everything that is shown is one short line, and a patch is within the CD.
fn read(cd: &[u8]) {
    let one_line = |text: &str| {
        assert!(!text.contains(char::is_control) && text.len() < 4096, "{text:?}");
    };
    match analyze(cd) {
        Err(error) => one_line(&format!("{error:#}")),
        Ok(None) => {}
        Ok(Some(media)) => {
            one_line(&media.to_string());
            assert!(!media.editions.is_empty());
            for edition in &media.editions {
                assert!(media.edition(edition.shown()).is_some() || edition.shown().is_empty());
            }
            if let Some(patch) = media.patch() {
                let mut old = vec![0; patch.old.len()];
                cd.read(&mut old, patch.offset).expect("a patch within the CD");
                assert_eq!(old, patch.old);
                assert_eq!(patch.new.len(), patch.old.len());
            }
        }
    }
    let Ok(Some(files)) = FileSystem::open(cd) else { return };
    for folder in ["", "sources", "efi/microsoft/boot"] {
        let Ok(listed) = files.list(cd, folder) else { continue };
        for (_, file) in listed {
            let end = file.extents().iter().map(|extent| extent.start + extent.length).max();
            let is_inside = end.unwrap_or(0) <= cd.len() as u64;
            assert_eq!(file.check(cd).is_ok(), is_inside, "{folder}");
        }
    }
    for path in [testutil::EFI_IMAGE, testutil::WIM] {
        let Ok(Some(file)) = files.find(cd, path) else { continue };
        let length = file.length().min(1 << 20);
        let mut bytes = vec![0; usize::try_from(length).expect("at most 1 MiB")];
        let read = file.read(cd, &mut bytes, 0).is_ok();
        assert!(read || file.check(cd).is_err(), "{path}");
    }
}
