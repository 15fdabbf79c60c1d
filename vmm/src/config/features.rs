//! `--features`: the features of processor and hypervisor that the guest sees.

use std::fmt;

use host::keyvalue;
use serde::{Deserialize, Serialize};

/// The value of `--features`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default, rename_all = "kebab-case")]
pub struct Features {
    /// Nested virtualization (Intel VMX, AMD SVM): the guest can run virtual machines.
    pub nested: bool,
    /// The guest sees only what every processor of this level has.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub level: Option<Level>,
    /// Features that are hidden from the guest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub without: Option<Hidden>,
    /// The vendor that Hyper-V's leaves name, instead of `Microsoft Hv`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hv_vendor: Option<Vendor>,
}

impl Features {
    pub fn hides(&self, feature: Hide) -> bool {
        self.without.as_ref().is_some_and(|hidden| hidden.0.contains(&feature))
    }
}

/// A level of x86-64's features, as the System V ABI has them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Level {
    #[serde(rename = "x86-64-v2")]
    V2,
    #[serde(rename = "x86-64-v3")]
    V3,
    #[serde(rename = "x86-64-v4")]
    V4,
}

impl Level {
    pub fn name(self) -> &'static str {
        match self {
            Self::V2 => "x86-64-v2",
            Self::V3 => "x86-64-v3",
            Self::V4 => "x86-64-v4",
        }
    }
}

/// Features, separated by `:` in text form.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Hidden(pub Vec<Hide>);

macro_rules! hide {
    ($($(#[doc = $help:literal])+ $word:literal $name:ident,)+) => {
        /// A feature that can be hidden, by its name in QEMU.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
        pub enum Hide {
            $($(#[doc = $help])+ #[serde(rename = $word)] $name,)+
        }

        impl Hide {
            pub const ALL: &[(&str, Self)] = &[$(($word, Self::$name)),+];
        }
    };
}

hide! {
    /// KVM's own leaves, at 0x40000000, or at 0x40000100 after those of Hyper-V.
    "kvm" Kvm,
    /// The bit that says that there is a hypervisor. Without it, nobody looks for its leaves.
    "hypervisor" Hypervisor,
    /// Watchdogs of the guest are patient.
    "hv-relaxed" HvRelaxed,
    /// The local APIC by MSR, and the VP assist page.
    "hv-vapic" HvVapic,
    /// The reference counter and the reference TSC page.
    "hv-time" HvTime,
    /// Crashes are reported by MSR.
    "hv-crash" HvCrash,
    /// The number of the processor.
    "hv-vpindex" HvVpindex,
    /// The time for which the processor ran.
    "hv-runtime" HvRuntime,
    /// The synthetic interrupt controller.
    "hv-synic" HvSynic,
    /// Synthetic timers.
    "hv-stimer" HvStimer,
    /// Synthetic timers that raise an interrupt without a message.
    "hv-stimer-direct" HvStimerDirect,
    /// The frequencies of TSC and APIC by MSR.
    "hv-frequencies" HvFrequencies,
    /// Hypercalls that flush the TLBs of other processors.
    "hv-tlbflush" HvTlbflush,
    /// Such flushes of ranges of pages.
    "hv-tlbflush-ext" HvTlbflushExt,
    /// Hypercalls that interrupt other processors.
    "hv-ipi" HvIpi,
    /// Parameters of hypercalls in XMM registers.
    "hv-xmm-input" HvXmmInput,
    /// The advice not to use AutoEOI, so that the host can accelerate the APIC.
    "hv-avic" HvAvic,
    /// The number of spinlock retries.
    "hv-spinlocks" HvSpinlocks,
}

impl TryFrom<String> for Hidden {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let read = |word| serde_json::from_value(serde_json::Value::from(word));
        let all = text.split(':').map(read).collect::<Result<_, _>>();
        all.map(Self).map_err(|error| keyvalue::explain(error).to_string())
    }
}

impl From<Hidden> for String {
    fn from(hidden: Hidden) -> Self {
        let word =
            |it: &Hide| Hide::ALL.iter().find(|(_, known)| known == it).map(|(word, _)| *word);
        hidden.0.iter().filter_map(word).collect::<Vec<_>>().join(":")
    }
}

/// One to twelve printable characters of ASCII.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Vendor(String);

impl Vendor {
    pub const LENGTH: usize = 12;

    /// The three registers of the leaf.
    pub fn registers(&self) -> [u32; 3] {
        let mut bytes = [0; Self::LENGTH];
        bytes[..self.0.len()].copy_from_slice(self.0.as_bytes());
        let word = |at: usize| u32::from_le_bytes([0, 1, 2, 3].map(|it| bytes[at * 4 + it]));
        [word(0), word(1), word(2)]
    }
}

impl TryFrom<String> for Vendor {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let fits = (1..=Self::LENGTH).contains(&text.len());
        if fits && text.bytes().all(|byte| byte.is_ascii_graphic() || byte == b' ') {
            return Ok(Self(text));
        }
        Err(format!("`{}` is no vendor: write 1 to 12 characters of ASCII", text.escape_debug()))
    }
}

impl From<Vendor> for String {
    fn from(vendor: Vendor) -> Self {
        vendor.0
    }
}

impl fmt::Display for Vendor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod test {
    use super::*;

    fn read(text: &str) -> anyhow::Result<Features> {
        keyvalue::parse(text, None)
    }

    #[test]
    fn features_are_read_and_written_by_their_names() {
        let all: Vec<_> = Hide::ALL.iter().map(|(word, _)| *word).collect();
        let all = format!("nested,without={},hv-vendor=Generic  Hv", all.join(":"));
        let features = read(&all).unwrap();
        assert!(features.nested && Hide::ALL.iter().all(|(_, it)| features.hides(*it)));
        let json = serde_json::to_string(&features).unwrap();
        assert_eq!(serde_json::from_str::<Features>(&json).unwrap(), features);
        assert!(!read("nested=off").unwrap().hides(Hide::Kvm));
    }

    #[test]
    fn unknown_features_and_vendors_are_explained() {
        for (text, why) in [
            ("without=hv-relax", "did you mean `hv-relaxed`?"),
            ("without=kvm:", "unknown value ``"),
            ("hv-vendor=", "1 to 12 characters"),
            ("hv-vendor=1234567890abc", "1 to 12 characters"),
            ("hv-vendor=é", "1 to 12 characters"),
            ("nest", "did you mean `nested`?"),
        ] {
            let error = format!("{:#}", read(text).unwrap_err());
            assert!(error.contains(why), "{text}: {error}");
        }
    }

    #[test]
    fn a_vendor_fills_three_registers() {
        let vendor = Vendor::try_from("Microsoft Hv".to_owned()).unwrap();
        assert_eq!(vendor.registers(), [0x7263_694d, 0x666f_736f, 0x7648_2074]);
        assert_eq!(Vendor::try_from("ab".to_owned()).unwrap().registers(), [0x6261, 0, 0]);
    }
}
