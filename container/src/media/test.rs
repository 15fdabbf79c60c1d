//! Tests of the readers on CDs in memory. `container/tests/media` has those on CDs of other
//! programs.

use host::testutil::noise::Noise;

use super::el_torito;
use super::noprompt::Question;
use super::testutil::{
    BIOS_IMAGE, DESCRIPTORS, EFI_IMAGE, Layout, QUIET_IMAGE, WIM, cd, image, install_cd, seal, wim,
    windows_11,
};
use super::windows::{Media, analyze};
use super::*;

const LAYOUTS: [Layout; 3] = [Layout::Bridge, Layout::Metadata, Layout::Iso];

fn media(cd: &[u8]) -> Media {
    analyze(cd).unwrap().unwrap()
}

#[test]
fn files_of_every_layout_are_found() {
    for layout in LAYOUTS {
        let bytes = install_cd(layout, &windows_11(9));
        let image = &bytes[..];
        let files = FileSystem::open(image).unwrap().unwrap();
        assert_eq!(matches!(files, FileSystem::Iso(_)), layout == Layout::Iso);
        let read = |path: &str| {
            let file = files.find(image, path).unwrap()?;
            Some(file.all(image, 1 << 20).unwrap())
        };
        assert_eq!(read(BIOS_IMAGE), Some(vec![1; 4096]), "{layout:?}");
        assert_eq!(read("/EFI/MICROSOFT//BOOT/efisys.bin"), Some(vec![2; 8192]));
        assert_eq!(read(WIM), Some(wim(&windows_11(9))));
        for path in ["", "efi", "none", "efi/none", "efi/microsoft/boot/efisys.bin/x"] {
            assert_eq!(read(path), None, "{layout:?} {path}");
        }
    }
    assert!(FileSystem::open(&[0; 1 << 20][..]).unwrap().is_none());
}

#[test]
fn the_patch_leads_to_the_image_that_does_not_ask() {
    for layout in LAYOUTS {
        let mut bytes = install_cd(layout, &windows_11(9));
        let Question::Avoided(patch) = media(&bytes).question else { panic!("{layout:?}") };
        let at = usize::try_from(patch.offset).unwrap();
        assert_eq!(bytes[at..at + 4], patch.old);
        bytes[at..at + 4].copy_from_slice(&patch.new);
        assert_eq!(media(&bytes).question, Question::Never);
        let entries = el_torito::entries(&bytes[..]).unwrap();
        let of = |entry: &el_torito::Entry| (entry.platform, entry.bootable, entry.count);
        assert_eq!(entries.iter().map(of).collect::<Vec<_>>(), [(0, true, 8), (0xef, true, 1)]);
        let start = usize::try_from(entries[1].sector).unwrap() * SECTOR_BYTES;
        assert_eq!(bytes[start], 3);
    }
}

#[test]
fn without_a_fitting_image_the_question_stays() {
    let with = |quiet: Option<usize>| {
        let mut files = vec![(EFI_IMAGE, vec![2; 8192]), (WIM, wim(&windows_11(9)))];
        files.extend(quiet.map(|length| (QUIET_IMAGE, vec![3; length])));
        media(&cd(Layout::Bridge, &files)).question
    };
    assert!(matches!(with(Some(8192)), Question::Avoided(_)));
    // Another length, no file, or an empty one.
    assert_eq!([Some(6144), None, Some(0)].map(with), [const { Question::Asked }; 3]);
    // The catalog leads to a copy of the file, or to something else.
    for (content, fits) in [(2, true), (4, false)] {
        let mut files = vec![(EFI_IMAGE, vec![2; 8192]), (QUIET_IMAGE, vec![3; 8192])];
        files.extend([("copy", vec![content; 8192]), (WIM, wim(&windows_11(9)))]);
        let mut bytes = cd(Layout::Bridge, &files);
        let entry = el_torito::entries(&bytes[..]).unwrap()[1];
        let volume = FileSystem::open(&bytes[..]).unwrap().unwrap();
        let copy = volume.find(&bytes[..], "copy").unwrap().unwrap().whole().unwrap();
        let copy = u32::try_from(copy.start / SECTOR).unwrap();
        let at = usize::try_from(entry.sector_at).unwrap();
        bytes[at..at + 4].copy_from_slice(&copy.to_le_bytes());
        assert_eq!(matches!(media(&bytes).question, Question::Avoided(_)), fits);
    }
    // A catalog without its checksum.
    let mut bytes = install_cd(Layout::Bridge, &windows_11(9));
    bytes[22 * SECTOR_BYTES + 4] ^= 1;
    assert_eq!(media(&bytes).question, Question::Asked);
}

#[test]
fn editions_are_found_by_their_words() {
    let entry = |index, name: &str, edition: &str| image(index, name, edition, "Client", 9);
    let mut images = vec![
        image(1, "Windows Setup Media", "", "", 9),
        image(2, "Microsoft Windows PE (x64)", "WindowsPE", "WindowsPE", 9),
        image(3, "Microsoft Windows Setup (x64)", "WindowsPE", "WindowsPE", 9),
    ];
    images.extend([
        entry(4, "Windows 11 Home", "Core"),
        entry(5, "Windows 11 Home N", "CoreN"),
        entry(6, "Windows 11 Pro", "Professional"),
        entry(7, "Windows 11 Pro for Workstations", "ProfessionalWorkstation"),
        entry(8, "Windows 11 Enterprise LTSC", "EnterpriseS"),
    ]);
    let media = media(&install_cd(Layout::Bridge, &images));
    let index = |wanted: &str| media.edition(wanted).map(|it| it.index);
    for (wanted, found) in [
        ("home", Some(4)),
        ("Home-N", Some(5)),
        ("pro", Some(6)),
        ("professional", Some(6)),
        ("windows 11 pro", Some(6)),
        ("pro-workstation", Some(7)),
        ("ltsc", Some(8)),
        ("enterprise", None),
        ("", None),
    ] {
        assert_eq!(index(wanted), found, "{wanted}");
    }
    assert!(media.to_string().ends_with("Windows 11 Pro for Workstations and 1 more"), "{media}");
    assert!(!media.is_server() && !media.is_evaluation());
}

#[test]
fn a_cd_that_ends_early_is_cut_off() {
    for layout in LAYOUTS {
        let bytes = install_cd(layout, &windows_11(9));
        let whole = bytes.len() / SECTOR_BYTES;
        // The last sectors are the WIM's, with its XML data.
        let error = analyze(&bytes[..(whole - 1) * SECTOR_BYTES]).unwrap_err();
        assert!(error.to_string().starts_with("it is cut off"), "{layout:?}: {error:#}");
        for sectors in 0..whole {
            let part = &bytes[..sectors * SECTOR_BYTES];
            assert!(!matches!(analyze(part), Ok(Some(_))), "{layout:?}: {sectors}");
        }
    }
}

#[test]
fn hostile_descriptors_are_read_in_bounds() {
    let mut noise = Noise::new(16);
    for layout in LAYOUTS {
        let bytes = install_cd(layout, &windows_11(9));
        for _ in 0..400 {
            let mut bytes = bytes.clone();
            let sector = noise.choose(&DESCRIPTORS);
            let sector = &mut bytes[sector * SECTOR_BYTES..][..SECTOR_BYTES];
            for _ in 0..3 {
                let at = usize::try_from(noise.below(SECTOR)).unwrap();
                sector[at] = noise.choose(&[0, 1, 2, 0x7f, 0x80, 0xff]);
            }
            seal(sector);
            // Neither a panic nor an endless loop.
            analyze(&bytes[..]).ok();
        }
    }
}

#[test]
fn wims_with_mistakes_are_errors() {
    let with = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut file = wim(&windows_11(9));
        change(&mut file);
        let error = analyze(&cd(Layout::Bridge, &[(WIM, file)])[..]).unwrap_err();
        format!("{error:#}")
    };
    assert!(with(&|it| it[0] = 0).contains("no MSWIM"));
    assert!(with(&|it| it[8] = 0).contains("a header of 0 bytes"));
    assert!(with(&|it| it[40] = 2).contains("part 2 of 1"));
    assert!(with(&|it| it[44] = 9).contains("the header has 9 images, and the XML data 2"));
    assert!(with(&|it| it[78] = 1).contains("XML data of"));
    assert!(with(&|it| it[79] = 4).contains("compressed"));
    assert!(with(&|it| it[87] = 1).contains("cut off"));
    assert!(with(&|it| it.truncate(100)).contains("100 bytes are no WIM"));
    assert!(with(&|it| it[210] = b'>').contains("XML data"));
}

#[test]
fn reads_a_wim_that_is_not_on_a_cd() {
    let file = wim(&windows_11(9));
    let images = wim::images(&file[..], &Content::of(&file[..]).unwrap()).unwrap();
    assert_eq!(images.iter().map(|it| it.index).collect::<Vec<_>>(), [1, 2]);
}

#[test]
fn contents_are_read_across_their_extents() {
    let image: Vec<u8> = (0..100).collect();
    let mut content = Content::default();
    for (start, length) in [(10, 5), (15, 5), (50, 0), (40, 10)] {
        content.push(Extent { start, length }).unwrap();
    }
    assert_eq!(content.extents().len(), 2);
    content.truncate(18).unwrap();
    let mut bytes = [0; 12];
    content.read(&image[..], &mut bytes, 6).unwrap();
    assert_eq!(bytes, [16, 17, 18, 19, 40, 41, 42, 43, 44, 45, 46, 47]);
    assert!(content.read(&image[..], &mut bytes, 7).is_err());
    assert!(content.truncate(19).is_err());
    content.push(Extent { start: 95, length: 6 }).unwrap();
    let error = content.check(&image[..]).unwrap_err();
    assert!(error.downcast_ref::<Truncated>().is_some_and(|it| it.needed == 101), "{error}");
    assert!(content.push(Extent { start: u64::MAX, length: 1 }).is_err());
}

#[test]
fn directories_are_listed_without_their_directories() {
    let content = |path: &'static str| (path, path.as_bytes().to_vec());
    let files = ["a/Top.txt", "a/b/one.inf", "a/b/two.sys", "a/b/c/three.cat"].map(content);
    for layout in [Layout::Bridge, Layout::Metadata, Layout::Iso] {
        let cd = cd(layout, &files);
        let volume = FileSystem::open(&cd[..]).unwrap().unwrap();
        let list = |path: &str| {
            let listed = volume.list(&cd[..], path).unwrap().into_iter();
            let read = |(name, content): (String, Content)| {
                let bytes = content.all(&cd[..], 100).unwrap();
                (name.to_lowercase(), String::from_utf8(bytes).unwrap())
            };
            let mut listed: Vec<_> = listed.map(read).collect();
            listed.sort();
            listed
        };
        let file = |name: &str, text: &str| (name.to_owned(), text.to_owned());
        let two = [file("one.inf", "a/b/one.inf"), file("two.sys", "a/b/two.sys")];
        assert_eq!(list("A/b/"), two, "{layout:?}");
        assert_eq!(list("a"), [file("top.txt", "a/Top.txt")]);
        for path in ["", "none", "a/b/one.inf", "a/b/c/d", "a/b/three.cat"] {
            assert_eq!(list(path), [], "{layout:?} {path}");
        }
    }
}

#[test]
fn what_is_read_of_a_volume_ends() {
    let bytes = install_cd(Layout::Bridge, &windows_11(9));
    let volume = udf::Volume::open(&bytes[..]).unwrap().unwrap();
    let mut lists = (0..1 << 16).map(|_| volume.list(&bytes[..], "efi/microsoft/boot"));
    let error = lists.find_map(Result::err).expect("the work is limited");
    let sentence = format!("{error:#}");
    assert!(sentence.contains("more than 65536 descriptors are read"), "{sentence}");
    // A bundle of drivers has some hundred files.
    assert!(lists.next().is_some());
}
