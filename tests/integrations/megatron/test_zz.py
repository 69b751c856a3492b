import pytest
from layouts import LAYOUTS, Fault, replace
from test_megatron_exchanges import FAULTS
@pytest.mark.parametrize("k", range(5))
def test_x(megatron,tmp_path,k):
    name="ep2"
    f,_=FAULTS[name][0]; layout=LAYOUTS[name]
    f=replace(f,persistent=True,step=2)
    w=megatron.run("train",layout.world,layout,tmp_path,callbacks="NanCallback, Retry",faults=(f,),steps=4)
    [i]=w[0]["incidents"]; d=i["diagnosis"]
    with open("/tmp/h7-zz.txt","a") as o:
        print(name,f.rank,f.when,"->",[r["rank"] for r in i["ranks"]],i["microbatch"],d["module"],d["op"],d["cause"],i["message"][-160:],d["evidence"],w[0]["swallowed"],file=o)
