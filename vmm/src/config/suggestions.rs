//! Suggestions for misspelled options: "did you mean".

use host::keyvalue;

/// Option names of other programs, and our equivalents.
const OTHER_WORDS: [(&str, &str); 12] = [
    ("iso", "device ahci-cdrom,path=FILE.iso"),
    ("cdrom", "device ahci-cdrom,path=FILE.iso"),
    ("cd", "device ahci-cdrom,path=FILE.iso"),
    ("bios", "firmware"),
    ("smp", "cpus"),
    ("ram", "memory"),
    ("m", "memory"),
    ("append", "cmdline"),
    ("drive", "disk"),
    ("net", "device"),
    ("console", "serial"),
    ("vga", "display"),
];

/// The option that the user probably meant. It is an equivalent of another program's option, a name
/// with few different letters, or a name that `key` abbreviates or extends.
pub(super) fn suggest<'a>(key: &str, known: &[&'a str]) -> Option<&'a str> {
    let key = key.to_lowercase();
    let other = OTHER_WORDS.iter().find(|(word, _)| *word == key).map(|(_, ours)| *ours);
    let begins = |known: &&&str| {
        let shorter = key.len().min(known.len());
        shorter > 2 && (known.starts_with(&*key) || key.starts_with(**known))
    };
    let begun = known.iter().filter(begins).min_by_key(|known| known.len()).copied();
    other.or_else(|| keyvalue::nearest(&key, known)).or(begun)
}

#[cfg(test)]
mod test {
    use crate::config::Config;

    #[test]
    fn an_unknown_option_suggests_the_nearest() {
        for (said, meant) in [
            ("mem", "memory"),
            ("ram", "memory"),
            ("cpu", "cpus"),
            ("smp", "cpus"),
            ("memroy", "memory"),
            ("Disk-Image", "disk"),
            ("drive", "disk"),
            ("append", "cmdline"),
            ("firm", "firmware"),
            ("bios", "firmware"),
            ("cdrom", "device ahci-cdrom,path=FILE.iso"),
        ] {
            let error = Config::default().set(said, "x").unwrap_err().to_string();
            let is = format!("there is no option --{said}: did you mean --{meant}?");
            assert_eq!(error, is);
        }
        let error = Config::default().set("zeppelin", "x").unwrap_err().to_string();
        assert!(error.ends_with("`vmm help run` lists them"), "{error}");
    }
}
